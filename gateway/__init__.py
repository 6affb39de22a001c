"""The gateway service: speaks with clients, tokenizes, keeps their streams."""
