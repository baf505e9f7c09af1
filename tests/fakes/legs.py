"""Two instances that make requests worth splitting, however short these are."""

from typing import Final

from hetero_gateway.core.costs.profile import Constants

# One computes prompts quickly and answers slowly, the other one the other way round.
PROMPTS: Final = Constants(p1=1e-5, p2=0, p3=0, p4=0.01, p5=0, p6=0, p7=0, p8=0.2)
ANSWERS: Final = Constants(p1=2e-3, p2=0, p3=0, p4=0.01, p5=0, p6=0, p7=0, p8=0.01)
