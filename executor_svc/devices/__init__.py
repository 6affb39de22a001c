"""Devices behind one interface: cpu, neuron, simulated."""
