"""Root entry point of launch scripts: `python train.py FLAG ...` is `vime train FLAG ...`."""

from vime.cli.script import errors_as_exit_status, parse_args, prepare_pretrain_gpt, train

__all__ = ["parse_args", "train"]

if __name__ == "__main__":
    prepare_pretrain_gpt()
    try:
        from pretrain_gpt import extra_args_provider
    except ImportError:
        extra_args_provider = None
    with errors_as_exit_status():
        args = parse_args(extra_args_provider)
        train(args)
