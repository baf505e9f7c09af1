"""How many instances the load needs: the section ``following``."""
