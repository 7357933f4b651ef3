"""Heads in the formats of serving engines: `medusa_formats` states them, writer and reader follow it."""
