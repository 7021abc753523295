"""The routed experts of a model, split between a GPU and the CPU. Executes a plan; decides nothing."""
