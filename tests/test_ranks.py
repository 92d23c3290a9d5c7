from processes import together

from twinboot import ranks


def test_without_other_processes_there_is_one_rank_and_nothing_to_add_to_a_seed() -> None:
    assert ranks.share() == (0, 1)
    assert ranks.own() == ()


def test_each_process_knows_its_share() -> None:
    assert together(asked, ranks=3) == [[(0, 3), ()], [(1, 3), (1,)], [(2, 3), (2,)]]


def asked() -> list[tuple[int, ...]]:
    return [ranks.share(), ranks.own()]
