"""Settings of the tests that hold for all of them."""

from hypothesis import settings

# Time limits are pytest's: a shared machine makes one example slow now and then.
settings.register_profile("vime", deadline=None)
settings.load_profile("vime")
