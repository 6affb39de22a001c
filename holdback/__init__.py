"""Holdback: large language models on AWS Neuron devices, served as gRPC microservices."""
