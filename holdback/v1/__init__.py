"""Generated stubs of protos/holdback/v1; `make generate` writes them."""
