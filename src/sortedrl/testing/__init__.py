"""Tests for parts that others write: `check_engine` runs the contract of engines. Needs no pytest."""

from sortedrl.testing.engine_contract import BrokenRules, EngineContract, check_engine, contract_spec

__all__ = ["BrokenRules", "EngineContract", "check_engine", "contract_spec"]
