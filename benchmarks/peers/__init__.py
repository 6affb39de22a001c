"""Peers that benchmarks run beside Holdback, each a program of its own that may run under another interpreter."""
