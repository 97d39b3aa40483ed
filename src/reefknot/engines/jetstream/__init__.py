"""The engine on NATS JetStream: a store that many machines share."""
