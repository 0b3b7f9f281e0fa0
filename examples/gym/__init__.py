"""The `gym` example: tasks of reasoning-gym, made and scored by vime itself."""
