"""The scheduler service: queues, admission and every step of a model pool."""
