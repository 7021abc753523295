"""The demo model: SmolLM2-135M, its MLPs split into experts. Belongs here: fetching the source, the split's data,
assembling the checkpoint. Never: knowledge of it anywhere else, the result is an ordinary Qwen2-MoE folder.
"""
