"""What a chapter or a lab needs to run."""

__all__ = ["TIERS"]

TIERS = {"cpu": "runs on a CPU", "1gpu": "needs one GPU", "multi": "needs several GPUs"}
