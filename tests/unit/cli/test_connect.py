import socket

import pytest

from agentrl.cli.connect import connection_string, open_run_store, reserved_port
from agentrl.cli.locks import hold_lock
from agentrl.config import RunConfig, RunSection, StoreConfig
from agentrl.errors import UnavailableError
from agentrl.store.embedded import embedded_uri


def make_config(tmp_path, *, port: int | None = None, uri: str | None = None, timeout_s: float = 20.0) -> RunConfig:
    ports = {} if port is None else {"db_port": port}
    store = StoreConfig(db_connection_string=uri, db_timeout_s=timeout_s, **ports)
    return RunConfig(run=RunSection(run_name="demo", data_dir=tmp_path, log_dir=tmp_path / "logs"), store=store)


def test_a_given_address_is_used_as_it_is(tmp_path):
    assert connection_string(make_config(tmp_path, uri="mongodb://db/")) == "mongodb://db/"


def test_a_taken_default_port_is_replaced_and_remembered(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        config = make_config(tmp_path)
        by_default = config.store.model_copy(update={"db_port": taken})
        by_default.model_fields_set.discard("db_port")
        config = config.model_copy(update={"store": by_default})
        with reserved_port(config) as port:
            assert port != taken
        assert connection_string(config) == embedded_uri(port)


def test_a_taken_port_the_user_asked_for_is_refused_and_a_free_one_is_kept(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        refusal = pytest.raises(UnavailableError, match=f"db_port = {taken}: another program listens there")
        with refusal, reserved_port(make_config(tmp_path, port=taken)):
            pass
    with reserved_port(make_config(tmp_path, port=taken)) as port:
        assert port == taken


def test_two_databases_that_start_together_take_two_ports_before_either_listens(tmp_path, free_port):
    config = make_config(tmp_path / "one", port=free_port)
    by_default = config.store.model_copy(update={"db_port": free_port})
    by_default.model_fields_set.discard("db_port")
    other = make_config(tmp_path / "other").model_copy(update={"store": by_default})
    with reserved_port(config) as first, reserved_port(other) as second:
        assert first == free_port != second
    with reserved_port(other) as again:
        assert again == free_port


async def test_an_idle_embedded_database_is_started_for_one_command_and_stopped(tmp_path, capsys):
    config = make_config(tmp_path)
    async with open_run_store(config, may_create=True) as store:
        await store.put_run({"run_name": "demo"})
    async with open_run_store(config, may_start=True) as store:
        assert await store.get_run() == {"run_name": "demo"}
    assert capsys.readouterr().err.count("starting the embedded database") == 2
    with hold_lock(tmp_path / "database.lock", what="database", wait_s=0):
        port = int((tmp_path / "database.port").read_text())
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


async def test_a_run_that_is_not_there_is_named_and_not_created_by_looking(tmp_path):
    config = make_config(tmp_path)
    typo = config.model_copy(update={"run": config.run.model_copy(update={"run_name": "dmeo"})})
    async with open_run_store(config, may_create=True) as store:
        with pytest.raises(UnavailableError, match=r"there is no run dmeo in .*did you mean demo\?"):
            async with open_run_store(typo, must_exist=True):
                pass
        assert await store.list_runs() == ["demo"]


async def test_without_a_database_the_way_to_one_is_named(tmp_path):
    with pytest.raises(UnavailableError, match=r"there is no database in .*agentrl launch RUN_NAME"):
        async with open_run_store(make_config(tmp_path), may_start=True):
            pass


async def test_a_database_that_does_not_answer_is_a_user_error(tmp_path):
    config = make_config(tmp_path, uri="mongodb://127.0.0.1:9/", timeout_s=0.3)
    with pytest.raises(UnavailableError, match="no MongoDB answers"):
        async with open_run_store(config):
            pass
