"""Heads in the formats of engines and other trainers: `formats` lists the tables that writers and readers follow."""
