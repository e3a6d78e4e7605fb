"""Threads as an engine has them that shares its cores with no other. Import it before torch."""

import importlib

from jit import own_cores

own_cores.prepare()
importlib.import_module("jit.openmp")
