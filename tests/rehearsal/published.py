"""A Hub on this machine with every repository that the papers' tables read.

It also has troubles: gated repositories, too many requests, a download that breaks off, and a
renamed organisation. Texts consist of a few words of each language. Data sets have hundreds of rows
with the odd rows of tests/data/repositories.py. Benchmarks have a few questions in each of MGSM's
languages.
"""

import csv
import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from ssl import PROTOCOL_TLS_SERVER, SSLContext

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))

import repositories
from fake_hub import Hub
from narrow_models import FAMILIES, write_model
from repositories import Rows, jsonl, parquet, readme

from pipeline.languages import MGSM, language

TOKEN = "hf_rehearsal"
GATED = [
    *(f"models/{name}" for name in FAMILIES if name.startswith(("meta-llama/", "CohereLabs/"))),
    *("datasets/lelapa/Inkuba-instruct", "datasets/openlanguagedata/flores_plus"),
    "datasets/bigscience-data/roots_indic-bn_wikisource",
]
WORDS = {
    "en": (
        "water tree house child market road river school bread morning friend teacher garden letter"
        " window story"
    ),
    "sw": (
        "maji mti nyumba mtoto soko barabara mto shule mkate asubuhi rafiki mwalimu bustani barua"
        " dirisha hadithi"
    ),
    "bn": "জল গাছ বাড়ি শিশু বাজার রাস্তা নদী স্কুল রুটি সকাল বন্ধু শিক্ষক বাগান চিঠি জানালা গল্প",
    "te": ("నీరు చెట్టు ఇల్లు పిల్ల బజారు దారి నది బడి రొట్టె ఉదయం స్నేహితుడు గురువు తోట ఉత్తరం కిటికీ కథ"),
    "ja": "水 木 家 子供 市場 道 川 学校 パン 朝 友達 先生 庭 手紙 窓 物語",
    "de": (
        "Wasser Baum Haus Kind Markt Straße Fluss Schule Brot Morgen Freund Lehrer Garten Brief"
        " Fenster Geschichte"
    ),
    "fr": (
        "eau arbre maison enfant marché route fleuve école pain matin ami maître jardin lettre"
        " fenêtre histoire"
    ),
    "zh": "水 树 房子 孩子 市场 路 河 学校 面包 早晨 朋友 老师 花园 信 窗户 故事",
    "ru": (
        "вода дерево дом ребёнок рынок дорога река школа хлеб утро друг учитель сад письмо окно"
        " рассказ"
    ),
    "es": (
        "agua árbol casa niño mercado camino río escuela pan mañana amigo maestro jardín carta"
        " ventana cuento"
    ),
    "th": ("น้ำ ต้นไม้ บ้าน เด็ก ตลาด ถนน แม่น้ำ โรงเรียน ขนมปัง เช้า เพื่อน ครู สวน จดหมาย หน้าต่าง เรื่อง"),
}
SUBJECTS = 57
Write = Callable[["Texts", Path], None]


class Texts:
    """Texts that differ from each other, the same each time."""

    def __init__(self) -> None:
        self.random = random.Random(0)

    def text(self, code: str, words: int = 4) -> str:
        chosen = self.random.choices(WORDS[code].split(), k=words)
        return ("" if code in ("ja", "zh", "th") else " ").join(chosen) + (
            "。" if code in ("ja", "zh") else "."
        )

    def rows(self, count: int, **columns: str) -> Rows:
        """Rows of texts; columns: name -> language."""
        return [{name: self.text(code) for name, code in columns.items()} for _ in range(count)]


def fill(hub: Hub, folder: Path) -> None:
    """Fill a folder with every repository and file that the papers' tables read."""
    texts = Texts()
    for name, write in {**training_sets(), **benchmark_sets()}.items():
        path = folder / "datasets" / name
        write(texts, path)
        hub.push(f"datasets/{name}", path, REVISIONS.get(name))
    for name, tag in TAGS.items():
        hub.tags[f"datasets/{name}", tag] = hub.heads[f"datasets/{name}"]
    for address, (code, columns) in BITEXTS.items():
        path = folder / "bitext" / address.rpartition("/")[2]
        pairs = [(texts.text("en"), texts.text(code)) for _ in range(rows_of(code))]
        repositories.raw_bitext(path, code, columns, pairs)
        hub.files[address] = path.read_bytes()
    corpus = [texts.text(code) for code in ("en", "sw", "bn", "te", "ja") for _ in range(200)]
    corpus += [f"What is {n} plus {n + 2}? It is {2 * n + 2}." for n in range(90)] * 4
    corpus += [family.chat for family in FAMILIES.values() if isinstance(family.chat, str)] * 20
    for seed, name in enumerate(FAMILIES):
        write_model(name, folder / "models" / name, corpus, seed)
        hub.push(f"models/{name}", folder / "models" / name)
    hub.token = TOKEN
    hub.gated.update(GATED)
    hub.linked = (".safetensors", ".parquet", ".csv", "tokenizer.json")
    for name in ("Global-MMLU", "aya_dataset"):
        hub.renamed[f"datasets/CohereForAI/{name}"] = f"datasets/CohereLabs/{name}"


def add_troubles(hub: Hub) -> None:
    """Make the first requests fail: too many requests, and downloads that break off."""
    model = "Qwen/Qwen2.5-7B-Instruct"
    head = hub.heads[f"models/{model}"]
    hub.busy[f"/{model}/resolve/{head}/config.json"] = 1
    hub.busy["/api/datasets/microsoft/orca-math-word-problems-200k"] = 1
    hub.cut[f"/{model}/resolve/{head}/generation_config.json"] = 1
    hub.cut.update({address: 1 for address in BITEXTS if "swh" in address})
    weights = hub.repositories[f"models/{model}"][head]["model-00002-of-00004.safetensors"]
    hub.cut[f"/files/{hashlib.sha1(weights, usedforsecurity=False).hexdigest()}"] = 1


def proxy_certificate(folder: Path, hub: Hub) -> Path:
    """Write a certificate for the hub's process as a proxy of the hosts of BITEXTS."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    hub.hosts = "storage.googleapis.com", "data.statmt.org"
    names = "subjectAltName=" + ",".join(f"DNS:{host}" for host in hub.hosts)
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=rehearsal",
    ]
    files = ["-addext", names, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *files], check=True, capture_output=True)
    hub.tls = SSLContext(PROTOCOL_TLS_SERVER)
    hub.tls.load_cert_chain(certificate, key)
    return certificate


# --- training sets ---

BITEXTS = {  # path of the address -> language, columns
    "/allennlp-data-bucket/nllb/ben_Beng-eng_Latn.gz": ("bn", 9),
    "/allennlp-data-bucket/nllb/eng_Latn-swh_Latn.gz": ("sw", 9),
    "/allennlp-data-bucket/nllb/eng_Latn-tel_Telu.gz": ("te", 9),
    "/cc-matrix/en-ja.bitextf.tsv.gz": ("ja", 3),
}
REVISIONS = {"lelapa/Inkuba-instruct": "a417af0dd9fff92950f037857b0cfa6980cfc743"}
TAGS = {"izumi-lab/llm-japanese-dataset": "1.0.3"}
MANY = 150  # rows of a set that gives a share
A_SIDE = 66_000  # rows of math and of Swahili: table A.3's trainings take 64,000 of each
PAGE = {"en": 1100, "bn": 400}  # words of a page of plain text: 1,100 tokens


def rows_of(code: str) -> int:
    """Rows of each set of a language that gives a share: Swahili has three of them."""
    return A_SIDE // 3 if code == "sw" else MANY


def training_sets() -> dict[str, Write]:
    telugu = "telugu_alpaca_yahma_cleaned_filtered_romanized"
    gpteacher = "telugu_teknium_GPTeacher_general_instruct_filtered_romanized"
    return {
        "microsoft/orca-math-word-problems-200k": orca_math,
        "CohereLabs/aya_dataset": lambda _, folder: repositories.aya(folder),
        f"Telugu-LLM-Labs/{telugu}": telugu_csv,
        f"Telugu-LLM-Labs/{gpteacher}": telugu_csv,
        "ai4bharat/indic-align": lambda _, folder: repositories.indic_align(folder),
        "lumatic-ai/BongChat-v1-253k": bongchat,
        "lelapa/Inkuba-instruct": inkuba,
        "bigscience/xP3mt": xp3mt,
        "izumi-lab/llm-japanese-dataset": llm_japanese,
        "p1atdev/ichikara-instruction": lambda _, folder: repositories.ichikara(folder),
        "kunishou/databricks-dolly-15k-ja": dolly_ja,
        "open-web-math/open-web-math": open_web_math,
        "bigscience-data/roots_indic-bn_wikisource": bn_wikisource,
    }


def orca_math(texts: Texts, folder: Path) -> None:
    rows = texts.rows(A_SIDE, question="en", answer="en")
    for n, row in enumerate(rows):
        row["question"] += f" What is {n % 90} plus {n % 90 + 2}?"
        row["answer"] += f" It is {2 * (n % 90) + 2}."
    parquet(folder / "data/train-00000-of-00001.parquet", rows)


def telugu_csv(texts: Texts, folder: Path) -> None:
    repositories.telugu(folder)
    (file,) = folder.glob("*.csv")
    parts = ("en", "en", "en", "te", "te", "te", "en", "en", "en")
    with open(file, "a", newline="", encoding="utf-8") as lines:
        csv.writer(lines).writerows(
            [n, *(texts.text(code) for code in parts)] for n in range(3, MANY)
        )


def bongchat(texts: Texts, folder: Path) -> None:
    rows = texts.rows(MANY, instruction="bn", input="bn", output="bn")
    parquet(folder / "data/train-00000-of-00001.parquet", [*rows, rows[0] | {"input": None}])


def inkuba(texts: Texts, folder: Path) -> None:
    repositories.inkuba(folder)
    more = {"task": "mmt", "data_source": "nllb"}
    rows = [
        row | more for row in texts.rows(rows_of("sw"), instruction="sw", inputs="sw", targets="sw")
    ]
    parquet(
        folder / "data/swahili_train-00000-of-00001.parquet", [*rows, rows[0] | {"inputs": None}]
    )


def xp3mt(texts: Texts, folder: Path) -> None:
    repositories.xp3mt(folder)
    (file,) = (folder / "sw").glob("*.jsonl")
    jsonl(file, texts.rows(rows_of("sw"), inputs="sw", targets="sw"))


def llm_japanese(texts: Texts, folder: Path) -> None:
    jsonl(
        folder / "data-cc-by-sa.jsonl", texts.rows(MANY, instruction="ja", input="ja", output="ja")
    )


def dolly_ja(texts: Texts, folder: Path) -> None:
    more = {"category": "closed_qa", "index": "0"}
    rows = [more | row for row in texts.rows(MANY, instruction="ja", input="ja", output="ja")]
    folder.mkdir(parents=True)
    (folder / "databricks-dolly-15k-ja.json").write_text(
        json.dumps(rows, ensure_ascii=False), encoding="utf-8"
    )


def open_web_math(texts: Texts, folder: Path) -> None:
    more = {"url": "u", "date": "2021-04-13T00:00:00", "metadata": "{}"}
    for shard in range(2):
        rows = [more | {"text": texts.text("en", PAGE["en"])} for _ in range(MANY // 2)]
        parquet(folder / f"data/train-0000{shard}-of-00002.parquet", rows)


def bn_wikisource(texts: Texts, folder: Path) -> None:
    rows = [{"text": texts.text("bn", PAGE["bn"]), "meta": "{}"} for _ in range(MANY)]
    parquet(folder / "data/train-00000-of-00001.parquet", rows)


# --- benchmarks ---

# MGSM's words before a question and before a worked answer, those of the harness' task files
ASKED = {
    "en": ("Question:", "Step-by-Step Answer:"),
    "sw": ("Swali:", "Jibu la Hatua kwa Hatua:"),
    "bn": ("প্রশ্ন:", "ধাপে ধাপে উত্তর:"),
    "te": ("ప్రశ్న:", "దశలవారీగా సమాధానం:"),
    "ja": ("問題：", "ステップごとの答え："),
    "de": ("Frage:", "Schritt-für-Schritt-Antwort:"),
    "fr": ("Question :", "Réponse étape par étape :"),
    "zh": ("问题：", "逐步解答："),
    "ru": ("Задача:", "Пошаговое решение:"),
    "es": ("Pregunta:", "Respuesta paso a paso:"),
    "th": ("โจทย์:", "คำตอบทีละขั้นตอน:"),
}


def benchmark_sets() -> dict[str, Write]:
    return {
        "juletxara/mgsm": mgsm,
        "facebook/belebele": belebele,
        "openlanguagedata/flores_plus": flores_plus,
        "CohereLabs/Global-MMLU": global_mmlu,
        "google-research-datasets/mbpp": mbpp,
    }


def mgsm(texts: Texts, folder: Path) -> None:
    configs = {}
    for code in MGSM:
        before, worked = ASKED[code]
        shown = [
            {
                "question": f"{before} {texts.text(code)} {n} + 2?",
                "answer": f"{worked} {texts.text(code, 4)} {n + 2}.",
                "answer_number": n + 2,
                "equation_solution": f"{n} + 2 = {n + 2}.",
            }
            for n in range(1, 9)
        ]
        unknown = {"answer": None, "equation_solution": None}
        asked = [
            {"question": f"{texts.text(code)} {n} + 3?", "answer_number": n + 3} | unknown
            for n in range(1, 9)
        ]
        jsonl(folder / code / "train.jsonl", shown)
        jsonl(folder / code / "test.jsonl", asked)
        configs[code] = {split: f"{code}/{split}.jsonl" for split in ("train", "test")}
    readme(folder, configs)


def belebele(texts: Texts, folder: Path) -> None:
    configs = {}
    for code in MGSM:
        flores = language(code).flores
        options = {f"mc_answer{n}": code for n in range(1, 5)}
        rows = [
            {
                "link": f"u{at // 2}",
                "question_number": 1 + at % 2,
                **row,
                "correct_answer_num": str(1 + at % 4),
                "dialect": flores,
                "ds": "2023-05-03T00:00:00",
            }
            for at, row in enumerate(texts.rows(10, flores_passage=code, question=code, **options))
        ]
        jsonl(folder / "data" / f"{flores}.jsonl", rows)
        configs[flores] = {"test": f"data/{flores}.jsonl"}
    (folder / "unused").mkdir()
    (folder / "unused/belebele.py").write_text("")
    readme(folder, configs)


def flores_plus(texts: Texts, folder: Path) -> None:
    configs = {}
    for code in MGSM:
        flores = {"zho_Hans": "cmn_Hans"}.get(language(code).flores, language(code).flores)
        names = dict(zip(("iso_639_3", "iso_15924"), flores.split("_"), strict=True))
        for split in ("dev", "devtest"):
            rows = [{"id": at, **names, "text": texts.text(code)} for at in range(5)]
            jsonl(folder / split / f"{flores}.jsonl", rows)
        configs[flores] = {split: f"{split}/{flores}.jsonl" for split in ("dev", "devtest")}
    readme(folder, configs)


def global_mmlu(texts: Texts, folder: Path) -> None:
    configs = {}
    for code in MGSM:
        if code == "th":
            continue
        for split, count in (("dev", 5 * SUBJECTS), ("test", SUBJECTS)):
            options = {f"option_{letter}": code for letter in "abcd"}
            rows = [
                {
                    "sample_id": f"subject_{at % SUBJECTS}/{split}/{at}",
                    "subject": f"subject_{at % SUBJECTS}",
                    "subject_category": "STEM",
                    **row,
                    "answer": "ABCD"[at % 4],
                    "is_annotated": False,
                }
                for at, row in enumerate(texts.rows(count, question=code, **options))
            ]
            parquet(folder / f"{code}/{split}-00000-of-00001.parquet", rows)
        configs[code] = {split: f"{code}/{split}-*" for split in ("dev", "test")}
    readme(folder, configs)


def mbpp(texts: Texts, folder: Path) -> None:
    rows = [
        {
            "task_id": at,
            "text": f"Write a function. {texts.text('en')}",
            "code": f"def f{at}(): ...",
            "test_list": [f"assert f{at}() is None"] * 3,
            "test_setup_code": "",
            "challenge_test_list": [],
        }
        for at in range(4)
    ]
    for split in ("train", "test", "validation", "prompt"):
        parquet(folder / f"full/{split}-00000-of-00001.parquet", rows)
    readme(
        folder,
        {"full": {split: f"full/{split}-*" for split in ("train", "test", "validation", "prompt")}},
    )
