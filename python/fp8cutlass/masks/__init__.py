"""Masks of any form, packed once: which tiles of keys rows visit, and the bits of those that are seen in part."""
