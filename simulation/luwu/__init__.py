"""LuWu's step: its bytes by link, its seconds, its memory."""
