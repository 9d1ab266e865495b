from absent import put_in_place

put_in_place(__name__, "io", "ops", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional")
__version__ = "0"
