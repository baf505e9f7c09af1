"""Where to find the weights of a built-in model card; ``templates/checkpoints.yaml`` has the
names."""

from hetero_gateway.deploy.template import pieces


def checkpoint_of(card: str) -> str:
    """The argument of ``vllm serve`` for a built-in card; the name itself if none is known."""
    listed = pieces("checkpoints.yaml")
    if card in listed["cards"]:
        return str(listed["cards"][card])
    for family in listed["families"]:
        if card.startswith(family["prefix"]):
            return f"{family['publisher']}/{card}{family['suffix']}"
    return card
