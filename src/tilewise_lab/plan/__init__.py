"""`tilewise plan`: how to divide a long sequence among GPUs. Nothing runs; every strategy is simulated.

tilewise plan --seqlen 1M --ranks 256 --causal
tilewise plan --seqlen 128k --ranks 8 --window 4096 0 --machine 8xH100+200G
tilewise plan --seqlen 1M --ranks 64 --causal --svg ring.svg --json plans.json
"""

from tilewise_lab.plan.command import configure, run

__all__ = ["configure", "run"]
