"""The parity certificate of an export: recorded from the trained heads, replayed from the exported files alone."""
