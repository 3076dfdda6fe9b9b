"""What torch has for data parallel training besides the reducer: containers, communication hooks, averaging."""
