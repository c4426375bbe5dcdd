"""Chat templates: bounded whatever they do, and what templates of real models use works."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from datetime import datetime

import psutil
import pytest

from jkv.io import chat_template
from jkv.io.chat_template import render

A = "'" + "a" * 1024 + "'"
DOUBLE = "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x }}"
TIME = [
    "{% set s = 'a' * 1048576 %}{% for i in s %}{% for j in s %}{% endfor %}{% endfor %}",
    "{{ (9 ** 99999) ** 99999 }}",
    "{{ lipsum(n=10 ** 7) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
]
MEMORY = [
    DOUBLE % (A, "ns.x ~ ns.x"),
    DOUBLE % (A, "ns.x + ns.x"),
    DOUBLE % ("[1]", "ns.x + ns.x"),
    DOUBLE % (A, "ns.x.replace('a', ns.x)"),
    DOUBLE % (A, "[ns.x, ns.x] | join"),
    DOUBLE % ("{'a': 1}", "{'a': ns.x, 'b': ns.x | string}"),
    "{{ '%99999999999d' % 1 }}",
    "{{ '%s' | format('x') }}{{ '%99999999999s' | format(1) }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ 'a'.ljust(10 ** 11) }}",
    "{{ 'a'.zfill(10 ** 11) }}",
    "{{ 'a' | center(10 ** 11) }}",
    "{{ 'a\nb' | indent(10 ** 11) }}",
    "{{ 'a\tb'.expandtabs(10 ** 11) }}",
    "{{ ['a', 'b'] | join('x' * 10 ** 10) }}",
    "{{ [[]] | tojson(indent=10 ** 10) }}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ [0] * 10 ** 10 }}",
    "{{ 1 | round(10 ** 9) }}{{ (10 ** 9).__format__ }}{{ 'x' * 999999999999 }}",
    "{{ 'x' * 100000000 }}",
]


@pytest.mark.parametrize("template", [*TIME, *MEMORY])
def test_template_time_and_memory_are_bounded(template: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.2)
    with pytest.raises(ValueError, match="chat template failed"):
        render(template, {"messages": []})
    assert render("{{ 1 + 1 }}", {}) == "2"  # and the next one is served


def test_stopped_child_process_is_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat_template, "LOOK", 1e-4)  # however often it is looked at, one that is slow is not ended
    assert render("{{ 1 }}", {}) == "1"
    chat_template._CHILD.process.send_signal(signal.SIGSTOP)
    with pytest.raises(ValueError, match="was stopped"):
        render("{{ 1 }}", {})
    assert render("{{ 1 }}", {}) == "1"


DIALECT = [
    ("{% generation %}a{{ 1 }}{% endgeneration %}b", "a1b"),
    ("{%- for m in messages -%}{% generation %}{{ m.content }}{% endgeneration %}{%- endfor -%}", "é"),
    ("{{ x | tojson }}", '{"b": "é<", "a": [1, 2]}'),
    ("{{ x | tojson(ensure_ascii=True) }}", '{"b": "\\u00e9<", "a": [1, 2]}'),
    ("{{ x | tojson(ensure_ascii=False, sort_keys=True) }}", '{"a": [1, 2], "b": "é<"}'),
    ("{{ x | tojson(separators=(',', ':')) }}", '{"b":"é<","a":[1,2]}'),
    ("{{ x.a | tojson(indent=2) }}", "[\n  1,\n  2\n]"),
    ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
    ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
    ("{{ messages[0]['content'] | trim | upper }}{{ messages[-1].role.split('s')[0] }}", "Éu"),
    ("{% if messages is string %}x{% elif tools is defined %}y{% else %}z{% endif %}", "z"),
]


@pytest.mark.parametrize(("template", "text"), DIALECT)
def test_constructs_of_real_templates_render(template: str, text: str):
    names = {"x": {"b": "é<", "a": [1, 2]}, "messages": [{"role": "user", "content": "é"}]}
    assert render(template, names) == text


def test_strftime_now_renders_date():
    said = render("{{ strftime_now('%Y-%m-%d') }}", {})
    assert abs((datetime.strptime(said, "%Y-%m-%d") - datetime.now()).days) <= 1


def test_texts_round_trip():
    for text in ("", "a" * 10**6, "é漢🎉\0\r\n\x85\u2028", "\ud800", "</script>&"):
        assert render("{{ x }}", {"x": text}) == text


def test_non_plain_values_are_refused():
    with pytest.raises(ValueError, match="texts, numbers, lists and mappings"):
        render("{{ x }}", {"x": object()})


def test_template_is_compiled_once_by_one_process():
    render("{{ 0 }}", {})
    first = chat_template._CHILD.process
    deep = "{{ x }}" + "{% if x %}{{ x }}{% endif %}" * 2000

    def spent(times: int) -> float:
        """Seconds of the processor, whatever else the machine does."""
        before = psutil.Process(first.pid).cpu_times()
        for _ in range(times):
            render(deep, {"x": 1})
        after = psutil.Process(first.pid).cpu_times()
        return after.user + after.system - before.user - before.system

    once = spent(1)
    assert spent(5) / 5 < once / 3
    assert chat_template._CHILD.process is first


def test_only_time_on_the_processor_counts(monkeypatch: pytest.MonkeyPatch):
    """A process that gets its answers late, because it was not let run, is as good as any other."""
    monkeypatch.setattr(chat_template, "SECONDS", 0.2)
    monkeypatch.setattr(chat_template, "LOOK", 3600)
    assert render("{{ 1 }}", {}) == "1"
    first = chat_template._CHILD.process
    first.send_signal(signal.SIGSTOP)
    while psutil.Process(first.pid).status() != psutil.STATUS_STOPPED:
        pass
    threading.Timer(0.5, first.send_signal, [signal.SIGCONT]).start()
    assert render("{{ 2 }}", {}) == "2" and chat_template._CHILD.process is first
    end = 1.5 + sum(psutil.Process(first.pid).cpu_times()[:2])
    while sum(psutil.Process(first.pid).cpu_times()[:2]) < end:  # all together take more than one prompt may
        render("{% for i in range(100000) %}{% endfor %}", {})
    assert chat_template._CHILD.process is first


def test_concurrent_renders_do_not_mix():
    got: dict[int, set[str]] = {}

    def ask(i: int) -> None:
        got[i] = {render("{{ x }}", {"x": f"{i}" * 1000}) for _ in range(20)}

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == {i: {f"{i}" * 1000} for i in range(8)}


ENDS = """
import sys
sys.path[:] = {path!r}
from jkv.io import chat_template
text = chat_template.render("{{{{ 1 }}}}", {{}})
print(text, chat_template._CHILD.process.pid, *{{"jax", "jinja2"}} & set(sys.modules))
"""


def test_child_process_ends_with_parent():
    code = ENDS.format(path=sys.path)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    said, child, *loaded = done.stdout.split()
    assert done.returncode == 0 and not done.stderr and said == "1" and "jinja2" not in loaded
    with pytest.raises(ProcessLookupError):
        os.kill(int(child), 0)


def test_child_process_imports_only_stdlib_and_jinja2():
    source = (chat_template.Path(chat_template.__file__).with_name("chat_template_child.py")).read_text()
    imported = set(re.findall(r"^\s*(?:from|import) (\w+)", source, re.M))
    assert "jinja2" in imported and imported <= {*sys.stdlib_module_names, "jinja2"}
