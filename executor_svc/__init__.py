"""The executor service: runs the steps that a scheduler sends on one device group."""
