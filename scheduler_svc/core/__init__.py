"""The scheduling core: state in, `SchedulerOutput` out. No gRPC, asyncio, torch, clock or environment."""
