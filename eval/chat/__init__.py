"""Chats with a model: fixed prompts that are checked, and a conversation in the terminal."""
