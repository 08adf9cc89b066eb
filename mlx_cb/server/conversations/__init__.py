"""Conversations of the web chat: kept in each person's account, answered on the server.

`store` keeps them, `answers` makes answers whoever looks or not, `feed` tells every open page what
changed, `transfer` carries them in and out, `routes` is their HTTP.
"""
