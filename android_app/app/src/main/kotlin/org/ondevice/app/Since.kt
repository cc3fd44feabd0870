package org.ondevice.app

/** Marks a class that uses calls newer than API 26; whoever makes one asks `Build.VERSION.SDK_INT` first. */
@Target(AnnotationTarget.CLASS)
@Retention(AnnotationRetention.BINARY)
annotation class Since(val api: Int)
