"""The planner: what a model costs, what devices can do, what each way of training would take, and which is best."""
