import pytest
import torch


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: there is none here")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = getattr(metafunc.function, "cases", None)
    if cases is not None:
        metafunc.parametrize("case", cases, ids=[str(case) for case in cases])
