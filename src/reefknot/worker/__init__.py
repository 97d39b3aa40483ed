"""Where assignments are taken in, wait in bounded queues, and run as steps."""
