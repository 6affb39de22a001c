"""The engine protocol of vLLM, `vllm.grpc.engine.VllmEngine` of the package smg-grpc-proto, so that the SMG gateway can
drive Holdback as it drives vLLM. Text is its caller's: requests come as token ids, and answers are token ids."""
