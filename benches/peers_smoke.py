"""Check the benchmark without peers: parsing of their output, medians and ratios.

`peers.py --smoke` runs it; tests/unit/test_bench_peers.py does too. The outputs are from real runs,
shortened.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import peers_report
from peers_engines import PeerError, batched_bench_rates, bench_rate
from peers_limits import Speed, limit_share
from peers_rows import BEST, MIDDLE, TARGETS, rows
from roofline import Product

BATCHED_BENCH = """
main: n_kv_max = 9216, n_batch = 2048, n_ubatch = 512, flash_attn = 1, n_threads = 2, n_threads_batch = 2

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|    64 |     12 |    1 |     76 |    0.216 |   296.30 |    0.363 |    33.06 |    0.579 |   131.26 |
|   480 |     12 |   16 |   7872 |    1.655 |   290.03 |    1.385 |   138.63 |    3.040 |  2589.47 |

llama_perf_context_print:        load time =     512.46 ms
"""
BENCH = """warning: asserts enabled
[
  {
    "n_threads": 2, "n_prompt": 512, "n_gen": 0, "avg_ns": 1548032110, "avg_ts": 330.74,
    "samples_ns": [ 1548032110 ], "samples_ts": [ 330.74 ]
  }
]
"""


def a_round(row: str, ours: float, llama: float, openvino: float) -> peers_report.Round:
    """Return a round with memory reads of 50, 40, 60 and 50 GB/s, and 200, 150, 250 and 200 GFLOP/s, between
    the engines."""
    context = str(MIDDLE[0])
    rates = {"llama.cpp": llama, "llaisys": ours, "openvino": openvino}
    return {
        "row": row,
        "build": "0",
        "machine": "a machine, avx512_bf16",
        "load": 0.25,
        "steal": 0.015,
        "when": "",
        "order": [*rates],
        "gb_s": [50.0, 40.0, 60.0, 50.0],
        "gflops": [200.0, 150.0, 250.0, 200.0],
        "rates": {name: {context: rate} for name, rate in rates.items()},
    }


def check() -> None:
    """Run all checks; raises AssertionError."""
    check_parsing()
    check_arithmetic()
    check_report()
    check_roofline()


def check_parsing() -> None:
    assert batched_bench_rates(BATCHED_BENCH) == {(64, 1): 33.06, (480, 16): 138.63}
    assert bench_rate(BENCH) == 330.74
    for parse in (batched_bench_rates, bench_rate):
        try:
            figure = parse("error: failed to load model")
        except PeerError:
            continue
        raise AssertionError(f"{parse.__name__} made {figure} of an error")


def check_arithmetic() -> None:
    # 100 steps at 25 per second and 100 at 100 per second take 5 s: 40 per second.
    assert abs(peers_report.tokens_per_s({"64": 25.0, "480": 100.0, "first_s": 9.0}) - 40.0) < 1e-9
    found = [a_round("decode-16-bf16", *r) for r in ((30, 10, 20), (20, 20, 10), (90, 30, 15))]
    # The best peer changes from round to round; the ratios' median is not the medians' ratio (30 / 20).
    assert peers_report.ratios(found, "llaisys", BEST) == [1.5, 1.0, 3.0]
    summary = peers_report.summarize(found)["engines"]["llaisys"]
    assert summary["ratios"] == {BEST: 1.5, "llama.cpp": 3.0, "openvino": 2.0}
    assert summary["tokens_per_s"] == 30.0
    # 40 and 60 GB/s around the measurement: 50; a step at no context reads 0.862 GB.
    one = a_round("decode-1-bf16", 50.0, 1.0, 1.0)
    one["rates"]["llaisys"] = {"0": 50.0}
    share = limit_share([one], "llaisys")
    assert share is not None
    assert abs(share - 50.0 * 861_654_784 / 50e9) < 1e-9
    # A prompt of 512 tokens takes 2 * 512 * 357,898,112 operations of the layers at twice 200 GFLOP/s, 5.6 of
    # attention and 0.07 of the head.
    prompt = a_round("prefill-512-bf16", 500.0, 1.0, 1.0)
    share = limit_share([prompt], "llaisys")
    least_s = 512 * 2 * 357_898_112 / 400e9 + (2 * 24 * 14 * 64 * 512 * 512 / 2 + 136_134_656 / 2) / 200e9
    assert share is not None
    assert abs(share - least_s * 500 / 512) < 1e-9
    # Without bf16 instructions, all at 200 GFLOP/s; the head at twice.
    prompt["machine"] = "a machine, avx2"
    share = limit_share([prompt], "llaisys")
    least_s = (512 * 2 * 357_898_112 + 4 * 24 * 14 * 64 * 512 * 512 / 2 + 136_134_656) / 200e9
    assert share is not None
    assert abs(share - least_s * 500 / 512) < 1e-9
    # A step at 8,192 tokens reads weights in 8 bits and 24 layers of 4 heads of 64 bytes with a scale.
    deep = a_round("decode-1-8k-int8", 50.0, 1.0, 1.0)
    deep["rates"]["llaisys"] = {"8192": 50.0}
    share = limit_share([deep], "llaisys")
    n_bytes = (357_898_112 + 136_134_656) * 34 / 32 + 8192 * 24 * 4 * 68
    assert share is not None
    assert abs(share - 50.0 * n_bytes / 50e9) < 1e-9
    assert limit_share([a_round("decode-1-smollm2", 50.0, 1.0, 1.0)], "llaisys") is None
    # Two tokens use 8 and 7.5 more of 128 experts, 6 * 4,718,592 weights each, with 6 * 19,136,512 others in
    # 4 bits and a head of 107 MB.
    two = a_round("decode-2-experts-4bit", 60.0, 1.0, 1.0)
    two["rates"]["llaisys"] = {"0": 60.0}
    share = limit_share([two], "llaisys")
    n_bytes = 6 * (15.5 * 4_718_592 + 19_136_512) * 18 / 32 + 49_152 * 2048 * 34 / 32
    assert share is not None
    assert abs(share - 60.0 / 2 * n_bytes / 50e9) < 1e-9


def check_report() -> None:
    names = [row.name for row in rows()]
    assert len(set(names)) == len(names)
    assert set(TARGETS) <= set(names)
    found = [a_round("decode-16-bf16", 30.0, 10.0, 15.0)] * 7
    (target,) = peers_report.targets_met(peers_report.table_of([a_round("http-16-smollm2", 50.0, 8.0, 9.0)]))
    assert target == ("http-16-smollm2", "llama.cpp", 6.25, 5.0, True)
    (target,) = peers_report.targets_met(peers_report.table_of(found))
    assert target[:2] == ("decode-16-bf16", "physical limit")
    with tempfile.TemporaryDirectory() as folder:
        before = {"decode-16-bf16": {"engines": {"llama.cpp": {"tokens_per_s": 9.5}}}}
        before["decode-16-bf16"]["engines"] |= {
            name: {"tokens_per_s": 10.0} for name in ("openvino", "llaisys")
        }
        before["decode-16-bf16"]["machine"] = found[-1]["machine"]
        peers_report.write(found, Path(folder) / "peers", {"openvino": "1"}, before)
        page = (Path(folder) / "peers.md").read_text()
        assert "| decode-16-bf16 | 30 | 10 (3.00x) | – | 15* (2.00x) |" in page
        assert "| **2.00x** | 7% | 50.0 | 0.2 | 1.5% | 7 | 1 |" in page
        # llama.cpp moved by 5 %, and ours is not a peer.
        assert [line for line in page.splitlines() if line[:2] == "- "] == ["- decode-16-bf16: openvino +50%"]
        results = json.loads((Path(folder) / "peers.json").read_text())
        assert results["targets"][0]["met"] is False
        peers_report.write(found, Path(folder) / "peers", {"openvino": "1"}, results["rows"])
        assert (Path(folder) / "peers.md").read_text() == page, "a row that was not measured keeps its flags"


def check_roofline() -> None:
    """Check that 1 ms is half as fast as 1 MB at 10 GB/s (100 us) and 10^8 operations at 200 GFLOP/s (500
    us)."""
    product = Product("linear-bf16-o", 16, 1e-3, n_bytes=1e6, n_operations=1e8)
    assert abs(product.share(Speed.of(10.0, 100.0, "avx512_bf16")) - 0.5) < 1e-9
    assert abs(product.share(Speed.of(1.0, 100.0, "avx512_bf16")) - 1.0) < 1e-9
