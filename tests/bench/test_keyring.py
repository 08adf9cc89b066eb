"""Keys that a run's users get: the server under test must be able to read them."""

from mlx_cb.bench.keyring import make_keyring
from mlx_cb.server.keys import Keys


def test_the_server_knows_everyone_by_his_key(tmp_path):
    ring = make_keyring(tmp_path, ["hog", "victim0", "hog"])
    assert set(ring.users) == {"hog", "victim0"}
    known = Keys(ring.path)
    for name, key in ring.users.items():
        user = known.find(key.encode())
        assert user is not None
        assert (user.name, user.is_admin) == (name, False)
    admin = known.find(ring.admin.encode())
    assert admin is not None
    assert admin.is_admin
