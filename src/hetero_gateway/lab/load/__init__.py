"""The load generator: replays a trace against any OpenAI-compatible URL and measures it.

``trace`` says what to send and when, ``prompts`` makes the bodies, ``client`` and ``replay`` send
them, ``result`` (pure) summarises. ``comparison`` (pure) and ``children`` serve the demo. It uses a
gateway over HTTP like any client, so it knows neither the gateway nor the emulator.
"""
