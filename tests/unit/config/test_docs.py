from agentrl.config import docs
from agentrl.config.compatibility import known_names
from agentrl.config.settings import settings_index


def test_every_known_name_is_documented_with_its_description():
    text = docs.render()
    for name in known_names():
        assert f"`{name}`" in text
    for setting in settings_index().values():
        assert setting.description
        assert setting.description in text


def test_check_tells_a_document_that_is_out_of_date(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(docs, "DOCUMENT", tmp_path / "docs" / "configuration.md")
    assert docs.main(["--check"]) == 1
    assert docs.main([]) == 0
    assert docs.main(["--check"]) == 0
    docs.DOCUMENT.write_text("old")
    assert docs.main(["--check"]) == 1
    assert "python -m agentrl.config.docs" in capsys.readouterr().err
