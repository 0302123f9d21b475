"""Rotation of the admin token: both are accepted for a while, calls go on, and then only the new one is left."""

import base64

import pytest
from operator_kit import MINIMAL, body, settings
from test_operator_reconcile import World

from paceline_operator.names import TOKENS, admin_token
from paceline_operator.rotation import OVERLAP, Salts, salts_of

KEY = settings().operator_key


def token(salt):
    return admin_token(KEY, "uid-1", salt)


def test_nothing_is_noted_while_nobody_asks():
    assert salts_of("", "", 0.0) == Salts()
    assert Salts().notes() == {}


def test_a_new_service_starts_with_what_is_asked():
    assert salts_of(None, "a", 0.0) == Salts("a")


def test_the_old_one_counts_until_the_overlap_is_over():
    first = salts_of("", "a", 1000.0)
    assert (first.accepted, first.calling, first.until) == (("a", ""), "", 1000 + OVERLAP)
    noted = first.notes()[TOKENS]
    assert salts_of(noted, "a", 1000.0 + OVERLAP - 1) == first
    after = salts_of(noted, "a", 1000.0 + OVERLAP)
    assert (after.accepted, after.calling) == (("a",), "a")
    assert salts_of(after.notes()[TOKENS], "a", 1e9) == after


def test_a_second_rotation_keeps_the_one_before():
    first = salts_of("", "a", 0.0)
    assert salts_of(first.notes()[TOKENS], "b", 10.0).accepted == ("b", "a")


def test_taking_the_annotation_away_is_a_rotation_too():
    after = Salts("a")
    assert salts_of(after.notes()[TOKENS], "", 0.0).accepted == ("", "a")


@pytest.mark.parametrize("text", ["junk", "[]", "3", '{"until": "x"}', '{"until": null}'])
def test_a_spoilt_note_counts_as_none(text):
    assert salts_of(text, "", 0.0) == Salts()


async def test_a_rotation_changes_the_secret_and_no_pod():
    world = World()
    world.wall = 1000.0
    world.reconciler.applier.wall = lambda: world.wall

    def asks(value, generation):
        item = body(MINIMAL, generation=generation, status=world.cluster.status("chat"))
        item["metadata"]["annotations"] = {"paceline.io/rotate-admin-token": value} if value else {}
        world.store.put("InferenceService", world.cluster.add(item))

    def accepted():
        data = world.cluster.objects["Secret", "chat-admin"]["data"]["token"]
        return base64.b64decode(data).decode().split("\n")

    def template():
        return world.cluster.objects["Deployment", "chat"]["spec"]["template"]

    asks("", 1)
    await world.run()
    before = template()
    assert accepted() == [token("")]

    asks("2030-01", 1)
    result = await world.run()
    assert accepted() == [token("2030-01"), token("")]
    assert result.target.token == token("")
    assert result.again == OVERLAP
    await world.run()
    assert world.cluster.writes() == []

    world.wall += OVERLAP
    result = await world.run()
    assert accepted() == [token("2030-01")]
    assert result.target.token == token("2030-01")
    await world.run()
    assert world.cluster.writes() == []
    assert template() == before
