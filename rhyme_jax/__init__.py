"""RhymeRL in JAX: reinforcement learning of language models, sped up by the history of its rollouts.

He et al., "History Rhymes: Accelerating LLM Reinforcement Learning with RhymeRL" (arXiv 2508.18588).
"""
