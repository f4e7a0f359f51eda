"""out_file=-, logprobs, overwrite and other fields of prompts, in the whole script."""
import json

RUN = ("--num_samples=2", "--max_new_tokens=9", "--device=cpu")


def test_lines_of_json_replace_the_samples_on_standard_output(run_script, char_checkpoint, tmp_path):
    run = f"--out_dir={char_checkpoint}", "--start=O", *RUN, "--logprobs=1"
    assert run_script(*run, "--out_file=a.jsonl", cwd=tmp_path).returncode == 0
    done = run_script(*run, "--out_file=-", cwd=tmp_path)
    assert done.stdout == (tmp_path / "a.jsonl").read_text() and not (tmp_path / "-").exists()


def test_the_file_has_fewer_alternatives_than_the_page(run_script, char_checkpoint, tmp_path):
    done = run_script(f"--out_dir={char_checkpoint}", "--start=O", *RUN, "--logprobs=2", "--out_file=a.jsonl", "--html_file=a.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    tokens = json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])["logprobs"]["content"]
    assert [len(token["top_logprobs"]) for token in tokens] == [2] * 9
    data = (tmp_path / "a.html").read_text(encoding="utf-8").partition("/json\">")[2].partition("<")[0]
    assert [len(token) for token in json.loads(data)] == [2 + 2 * 5] * 9 # length, probability, and five pairs


def test_overwrite_replaces_a_file_of_other_settings(run_script, char_checkpoint, tmp_path):
    run = f"--out_dir={char_checkpoint}", "--start=O", *RUN, "--out_file=a.jsonl", "--html_file=a.html"
    assert run_script(*run, cwd=tmp_path).returncode == 0
    before = (tmp_path / "a.jsonl").read_bytes()
    refused = run_script(*run, "--seed=5", cwd=tmp_path)
    assert refused.returncode == 1 and (tmp_path / "a.jsonl").read_bytes() == before
    failed = run_script(*run, "--seed=5", "--overwrite", "--draft=nowhere/model", cwd=tmp_path)
    assert failed.returncode == 1 and (tmp_path / "a.jsonl").read_bytes() == before
    done = run_script(*run, "--seed=5", "--overwrite", cwd=tmp_path)
    assert done.returncode == 0 and [json.loads(line)["seed"] for line in (tmp_path / "a.jsonl").read_text().splitlines()] == [5, 5]


def test_a_field_of_a_prompt_may_not_have_the_name_of_a_setting(run_script, char_checkpoint, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "O", "device": 1}\n')
    done = run_script(f"--out_dir={char_checkpoint}", "--start=JSONL:a.jsonl", *RUN, cwd=tmp_path)
    assert done.returncode == 1 and "a.jsonl, line 1: device is a setting of the whole run" in done.stderr


def test_a_session_draws_a_random_seed_and_warns_about_stop_texts_and_long_prompts(run_script, char_checkpoint):
    typed = b":seed=random\n:stop=\xc2\xa1\n" + b"O" * 500 + b"\n"
    done = run_script(f"--out_dir={char_checkpoint}", "--max_new_tokens=9", "--device=cpu", "--interactive", stdin=typed)
    assert "drawn at random" in done.stderr and "cannot end a sample" in done.stderr
    assert "\nthe prompt has 500 tokens, but the model sees only the last 16, which begin with 'OOOOOOOOOOOOOOOO'\n" in done.stderr
