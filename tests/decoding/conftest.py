"""One random target and drafter for all decoding tests, and shapes that let every session share its compilations."""

import pytest
from tiny_models import random_drafter, random_target


@pytest.fixture(scope="package")
def target():
    return random_target()


@pytest.fixture(scope="package")
def drafter(target):
    return random_drafter(target)
