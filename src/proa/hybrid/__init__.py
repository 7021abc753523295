"""The routed experts of a model, some computed by a GPU and the rest by the CPU, as one: executes, decides nothing."""
