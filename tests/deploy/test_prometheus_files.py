"""Checks the shipped scrape configuration, rules and dashboard without a deployment."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.config import RouterConfig
from router.metrics import METRICS, PREFIX
from tests.deploy.prometheus import ALERT, DEPLOY, dashboard_expressions, panels, program, rules

SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
EXPORTED = {f"{PREFIX}{metric.name}{suffix}" for metric in METRICS for suffix in SUFFIXES[metric.kind]}

LABELS = 'model_name="m", pool="decode", replica="decode-0"'
FIRING: dict[str, dict[str, str]] = {
    "TwopassRouterDown": {'up{job="twopass"}': "0x60"},
    "TwopassPoolEmpty": {'twopass_replicas{model_name="m", pool="decode", state="up"}': "0x60"},
    "TwopassReplicaSuspected": {'twopass_replicas{model_name="m", pool="decode", state="suspected"}': "1x60"},
    "TwopassReplicaKeepsDying": {f"twopass_replica_epoch{{{LABELS}}}": "3 3 4 5 6 7 7x60"},
    "TwopassQueueTooOld": {'twopass_queue_oldest_seconds{model_name="m"}': "20+15x60"},
    "TwopassTurningAway": {
        'twopass_requests_rejected_total{model_name="m", reason="queue_full"}': "0+1x60",
        'twopass_requests_accepted_total{model_name="m"}': "0+10x60",
    },
    "TwopassRequestsFail": {
        'twopass_requests_ended_total{model_name="m", reason="failed"}': "0+1x60",
        'twopass_requests_ended_total{model_name="m", reason="stop"}': "0+50x60",
    },
    "TwopassKernelsCompile": {f"twopass_kernel_compilations_total{{{LABELS}}}": "0x30 1x60"},
    "TwopassThrashing": {
        f"twopass_recomputed_tokens_total{{{LABELS}}}": "0+40x60",
        f"twopass_generated_tokens_total{{{LABELS}}}": "0+100x60",
    },
    "TwopassKVFull": {
        f'twopass_kv_blocks{{{LABELS}, state="used"}}': "97x60",
        f'twopass_kv_blocks{{{LABELS}, state="blank"}}': "3x60",
    },
    "TwopassTransfersFail": {
        f'twopass_transfer_failures_total{{{LABELS}, transport="t"}}': "0+1x60",
        f'twopass_transfer_expiries_total{{{LABELS}, transport="t"}}': "0x60",
        f'twopass_transfers_total{{{LABELS}, transport="t"}}': "0+20x60",
    },
    "TwopassLeasesExpire": {
        'twopass_leases_ended_total{model_name="m", replica="prefill-0", outcome="expired"}': "0x30 1x60"
    },
    "TwopassNotDisaggregated": {
        'twopass_requests_by_path_total{model_name="m", path="disaggregated"}': "0+10x60",
        'twopass_requests_by_path_total{model_name="m", path="colocated"}': "0+10x60",
        'twopass_replicas{model_name="m", pool="prefill", state="up"}': "1x60",
    },
    "TwopassSlowFirstToken": {
        'twopass_time_to_first_token_seconds_bucket{model_name="m", le="7.5"}': "0+9x60",
        'twopass_time_to_first_token_seconds_bucket{model_name="m", le="10.0"}': "0+10x60",
        'twopass_time_to_first_token_seconds_bucket{model_name="m", le="+Inf"}': "0+10x60",
    },
    "TwopassSlowTokens": {
        'twopass_inter_token_latency_seconds_bucket{model_name="m", le="0.5"}': "0+9x60",
        'twopass_inter_token_latency_seconds_bucket{model_name="m", le="0.75"}': "0+10x60",
        'twopass_inter_token_latency_seconds_bucket{model_name="m", le="+Inf"}': "0+10x60",
    },
}
"""Series by alert, with one value every 15 s in promtool's notation, which make the alert fire within 12 minutes."""


def promtool(*args: object) -> str:
    result = subprocess.run([program("promtool"), *map(str, args)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_promtool_finds_nothing_wrong() -> None:
    assert "FAILED" not in promtool("check", "config", DEPLOY / "prometheus" / "prometheus.yml")
    assert "FAILED" not in promtool("check", "rules", "--lint-fatal", DEPLOY / "prometheus" / "rules.yml")


def test_the_target_is_the_router_with_its_defaults() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    router = RouterConfig()
    assert job["static_configs"] == [{"targets": [f"{router.metrics_host}:{router.metrics_port}"]}]


def test_every_alert_has_a_case_and_ends_in_its_threshold() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert {rule["alert"] for rule in alerts} == set(FIRING)
    for rule in alerts:
        assert re.match(ALERT, rule["expr"]), rule["alert"]


@pytest.mark.parametrize("alert", FIRING)
def test_the_alert_fires(alert: str, tmp_path: Path) -> None:
    """Asks the series ALERTS whether one fires, since alert tests of promtool demand the exact labels of the alert."""
    test = {
        "rule_files": [str(DEPLOY / "prometheus" / "rules.yml")],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [{"series": series, "values": values} for series, values in FIRING[alert].items()],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})',
                        "eval_time": "12m",
                        "exp_samples": [{"labels": "{}", "value": 1}],
                    }
                ],
            }
        ],
    }
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump(test))
    promtool("test", "rules", path)


def test_nothing_fires_in_a_healthy_deployment_that_is_idle(tmp_path: Path) -> None:
    series = {key: "0x60" for case in FIRING.values() for key in case}
    series['up{job="twopass"}'] = "1x60"
    series['twopass_replicas{model_name="m", pool="decode", state="up"}'] = "1x60"
    series['twopass_replicas{model_name="m", pool="prefill", state="up"}'] = "1x60"
    test = {
        "rule_files": [str(DEPLOY / "prometheus" / "rules.yml")],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [{"series": key, "values": values} for key, values in series.items()],
                "promql_expr_test": [{"expr": 'ALERTS{alertstate="firing"}', "eval_time": "12m", "exp_samples": []}],
            }
        ],
    }
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump(test))
    promtool("test", "rules", path)


def test_rules_and_panels_name_only_what_is_exported() -> None:
    known = EXPORTED | {rule["record"] for rule in rules() if "record" in rule}
    used: set[str] = set()
    for expression in [rule["expr"] for rule in rules()] + [expression for _, expression in dashboard_expressions()]:
        used |= set(re.findall(r"twopass[_:][a-z0-9_:]+", expression))
    assert used <= known, used - known


def test_the_dashboard_shows_what_an_operator_looks_for() -> None:
    shown = " ".join(expression for _, expression in dashboard_expressions())
    for name in ("requests_waiting", "queue_oldest_seconds", "preemptions", "thrash_ratio", "step_tokens", "kv_blocks"):
        assert name in shown, name
    for name in (
        "transfer_bytes",
        "leases_ended",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_stage_seconds",
    ):
        assert name in shown, name


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    dashboard: dict[str, Any] = json.loads((DEPLOY / "grafana" / "twopass.json").read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells
    for panel in panels():
        assert panel["targets"], panel["title"]
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
