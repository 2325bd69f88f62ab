"""The training files of LLaMA-Factory, axolotl and TRL: each key becomes its option, and what cannot be trained is
refused. The tables are in the files of these programs."""

import pytest
import test_axolotl
import test_llamafactory
import test_trl_import

from backend.config.options import SpecError, get

PROGRAMS = {"axolotl": test_axolotl, "llamafactory": test_llamafactory, "trl": test_trl_import}


@pytest.mark.parametrize(
    ("program", "given", "option", "value"), [(name, *case) for name in PROGRAMS for case in PROGRAMS[name].OPTIONS]
)
def test_options(tmp_path, program, given, option, value):
    assert get(PROGRAMS[program].read(tmp_path, **given).spec, option) == value


@pytest.mark.parametrize(
    ("program", "given", "named"), [(name, *case) for name in PROGRAMS for case in PROGRAMS[name].REFUSED]
)
def test_refused(tmp_path, program, given, named):
    with pytest.raises(SpecError, match=named):
        PROGRAMS[program].read(tmp_path, **given)


TEXTS = {
    "axolotl": {"base_model": "a/b", "datasets": [{"path": "text", "data_files": ["book.txt"], "type": "completion"}]},
    "llamafactory": {"model_name_or_path": "a/b", "stage": "pt", "dataset": "book", "dataset_dir": "."},
}


@pytest.mark.parametrize("program", TEXTS)
def test_a_text_file_has_other_examples_than_with_the_datasets_library(tmp_path, program):
    (tmp_path / "dataset_info.json").write_text('{"book": {"file_name": "book.txt"}}')
    found = PROGRAMS[program].read(tmp_path, **TEXTS[program])
    assert found.spec.data.files == ("book.txt",)
    assert any("book.txt: Footplate reads a text file as one example" in text for text in found.different)
