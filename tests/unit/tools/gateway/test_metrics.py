from agentrl.tools.gateway.metrics import GatewayMetrics
from agentrl.tools.guard import BreakerState


def test_calls_are_counted_by_outcome_with_cumulative_durations():
    metrics = GatewayMetrics()
    for seconds, status in ((0.001, "ok"), (0.3, "ok"), (999.0, "timeout")):
        metrics.count_call(
            server="s", tool='t"\n\\', status=status, seconds=seconds, is_server_failure=status == "timeout"
        )
    metrics.count_refused("auth")
    lines = metrics.render(in_flight=2, waiting=1, breakers={"s": BreakerState.OPEN}).splitlines()
    assert "agentrl_gateway_in_flight 2" in lines
    assert 'agentrl_gateway_breaker_open{server="s"} 1' in lines
    assert 'agentrl_gateway_calls_total{server="s",tool="t\\"\\n\\\\",status="ok"} 2' in lines
    assert 'agentrl_gateway_refused_total{reason="auth"} 1' in lines
    buckets = [line for line in lines if "_bucket" in line]
    assert [int(line.rpartition(" ")[2]) for line in buckets] == [1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3]
    assert 'agentrl_gateway_call_seconds_sum{server="s"} 999.301' in lines
    assert 'agentrl_gateway_call_seconds_count{server="s"} 3' in lines


def test_failures_in_a_row_end_with_a_call_that_is_none():
    metrics = GatewayMetrics()
    for is_failure in (True, True):
        metrics.count_call(server="s", tool="t", status="x", seconds=0, is_server_failure=is_failure)
    assert metrics.failures_in_a_row("s") == 2
    metrics.count_call(server="s", tool="t", status="x", seconds=0, is_server_failure=False)
    assert metrics.failures_in_a_row("s") == 0
