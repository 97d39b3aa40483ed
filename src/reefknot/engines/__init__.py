"""What keeps: clocks, stores, queues, transports. Each implements ports; none knows another."""
