// Stands in for MLX's file, which specializes pointer_element once per address space: here all are the same type.
#pragma once
#include <metal_stdlib>
namespace metal {
template <class T> struct pointer_element {};
template <class T> struct pointer_element<T*> { using type = remove_cv_t<T>; };
template <class T> using pointer_element_t = typename pointer_element<remove_cv_t<T>>::type;
}  // namespace metal
