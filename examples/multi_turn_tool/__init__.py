"""The `multi_turn_tool` example: conversations with a calculator."""
