"""What is handed to vLLM."""

import json
from dataclasses import fields, replace

import msgspec

from contracts.rpc.tls import TlsFiles
from engine.vllm_engine import _engine_args
from kv_transfer.options import TransferOptions
from tests.support.samples import engine_config

UNUSUAL = TransferOptions(
    host="10.0.0.9",
    port=7001,
    transport="grpc",
    wire_dtype="int8",
    lease_s=7.0,
    fetch_deadline_s=11.5,
    faults="seed=7,drop=0.02",
    tls=TlsFiles("ca.pem", "cert.pem", "key.pem"),
)


def test_every_option_of_the_hand_off_reaches_the_connector_as_it_was_planned():
    usual = TransferOptions("127.0.0.1")
    same = [field.name for field in fields(UNUSUAL) if getattr(UNUSUAL, field.name) == getattr(usual, field.name)]
    assert same == [], "a field with its default would prove nothing"
    args = _engine_args(replace(engine_config(), transfer=UNUSUAL))
    told = json.loads(json.dumps(args["kv_transfer_config"].kv_connector_extra_config))
    assert msgspec.convert(told["transfer"], TransferOptions) == UNUSUAL
