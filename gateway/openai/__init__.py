"""The OpenAI HTTP API of a gateway: completions, chat completions and models, beside health, metrics and OpenAPI.

A request goes: key, body within its limits, JSON without tricks, fields (`fields`, `completion`, `chat`), one
`inference_pb2.Generation` for each prompt, and from there on the way that every protocol of the gateway takes
(`gateway.generations`). What comes back is written in OpenAI's shapes (`answers`, `events`), errors too (`errors`).

It is loaded only where `http_port` is set. Not covered: tools, images and audio, structured output; each is refused in
words, and so is every field that is not known, for a field that is dropped in silence changes what was asked for.
"""
