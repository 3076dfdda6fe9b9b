"""DeepSpeed's engine around a module: made, driven, and looked into."""
